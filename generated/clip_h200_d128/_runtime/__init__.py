"""What ships inside every generated package: validation, custom operators, the ring. Needs torch only."""
