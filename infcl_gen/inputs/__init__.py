"""What users give: problems, cluster files, configuration files; all parsing and validation is here."""
