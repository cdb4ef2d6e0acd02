"""Layouts, the notation of rules, the table of conversions, errors: values and words that all rooms share."""
