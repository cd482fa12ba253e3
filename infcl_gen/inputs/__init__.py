"""What users give: problems, cluster files, overrides. All parsing and validation is here."""
