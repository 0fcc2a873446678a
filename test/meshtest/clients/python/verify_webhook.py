"""Verifies a webhook from standard input with each secret of the command line, and prints what it has of it."""

import json
import sys

from standardwebhooks import Webhook, WebhookVerificationError

call = json.load(sys.stdin)
for secret in sys.argv[1:]:
    try:
        ended = Webhook(secret).verify(call["body"], call["headers"])
        print(ended["type"], ended["data"]["id"])
    except WebhookVerificationError as refusal:
        print(refusal)
