"""An OpenAI-compatible server around a ``Generator``; the only door to fastapi, uvicorn and prometheus_client."""
