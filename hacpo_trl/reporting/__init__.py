"""What a run tells: statistics of updates, progress, advice, tables of completions, the run's page and plots."""
