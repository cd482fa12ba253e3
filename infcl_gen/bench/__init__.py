"""Measuring generated packages, alone and beside other libraries."""
