"""Stores each body of the first argument as its own answer, and replays it. psycopg declares no type of a string."""

import json
import os
import sys

import psycopg

FORMS = {"bytes": "%(body)s::bytea", "string": "convert_to(%(body)s::text, 'UTF8')"}

with psycopg.connect(os.environ["DATABASE_URL"]) as conn:
    for sent in json.loads(sys.argv[1]):
        form, body = FORMS[sent["form"]], bytes.fromhex(sent["hex"])
        key = {"value": sent["value"], "body": body if sent["form"] == "bytes" else body.decode()}
        for expected in "claimed", "replayed":
            outcome, token, replayed = conn.execute(
                "select outcome, token, body from idempotency.ensure('ada', 'POST /notes', %(value)s,"
                f" idempotency.fingerprint({form}))",
                key,
            ).fetchone()
            assert outcome == expected, (outcome, sent)
            if outcome == "claimed":
                conn.execute(
                    f"select idempotency.complete('ada', 'POST /notes', %(value)s, %(token)s, body => {form})",
                    {**key, "token": token},
                )
            else:
                assert replayed == body, (replayed, sent)
            conn.commit()
