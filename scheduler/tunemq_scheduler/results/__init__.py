"""Results of a search: Result, ResultGrid, ExperimentAnalysis, and trial views for callbacks."""
