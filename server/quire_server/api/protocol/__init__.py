"""Models of requests and responses, and the errors. /openapi.json and docs/api.md derive from them."""
