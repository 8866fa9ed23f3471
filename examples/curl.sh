#!/usr/bin/env bash
# The server from a shell: its models, an answer, a stream, and an answer held to a pattern.
set -euo pipefail

url="${OUTRIDER_URL:-http://127.0.0.1:8000/v1}"
model="${OUTRIDER_MODEL:-smollm2-135m}"
auth=(-H "authorization: Bearer ${OUTRIDER_API_KEY:-none}")

ask() {
  curl --silent --show-error --fail-with-body --no-buffer "${auth[@]}" \
    -H "content-type: application/json" "$url/chat/completions" -d "$1"
  echo
}

curl --silent --show-error --fail-with-body "${auth[@]}" "$url/models"
echo
ask '{"model": "'"$model"'", "max_tokens": 30,
      "messages": [{"role": "user", "content": "Name three colours."}]}'
ask '{"model": "'"$model"'@baseline", "max_tokens": 10, "stream": true,
      "messages": [{"role": "user", "content": "Count to five."}]}'
ask '{"model": "'"$model"'", "max_tokens": 20, "response_format": {"type": "regex", "regex": "yes|no"},
      "messages": [{"role": "user", "content": "Is the sky blue?"}]}'
