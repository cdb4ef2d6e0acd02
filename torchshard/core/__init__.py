"""What all other rooms build on: layouts, the notation of rules, the table of conversions, errors, hashes and files."""
