"""What a search gives back: Result, ResultGrid, ExperimentAnalysis, and trials for callbacks."""
