"""Sampling responses: whose turn it is on a process, and vLLM's servers and client."""
