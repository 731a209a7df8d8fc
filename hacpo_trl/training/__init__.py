"""Training a team: the trainer, one agent, their arguments, loading, offloading and checkpoints."""
