"""OpenAI's Responses interface, without storage: other bodies, answers and events around a chat."""
