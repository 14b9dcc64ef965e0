"""What trials print: files with a limit, and patterns that are looked for."""
