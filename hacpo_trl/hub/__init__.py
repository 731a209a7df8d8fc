"""Sharing agents on the Hub: repositories, pushes and model cards."""
