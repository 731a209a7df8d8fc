"""Measuring models: letting them answer problems, and estimates from what they answered."""
