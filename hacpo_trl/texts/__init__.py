"""Texts: prompts, what agents exchange of their responses, and where a response ends."""
