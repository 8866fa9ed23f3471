"""The gateway: OpenAI's interface in front of engines, with a rollout between profiles."""
