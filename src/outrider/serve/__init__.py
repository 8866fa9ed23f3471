"""The OpenAI-compatible server: many users on one target, each under a profile of its choice."""
