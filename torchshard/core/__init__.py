"""The base of all other packages: layouts, rows, the table of conversions, errors, hashes and files."""
