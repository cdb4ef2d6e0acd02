"""Model, plan and example inputs in; the planned graph with its collectives out."""
