"""Measuring generated packages on a real device."""
