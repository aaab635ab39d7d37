"""An OpenAI-compatible server around a ``Generator``; only it imports fastapi, uvicorn and prometheus_client."""
