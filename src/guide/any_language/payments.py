"""FastAPI and psycopg 3: the key, the payment and the exact bytes of the answer commit in one transaction."""

import json
import os
from contextlib import asynccontextmanager

import psycopg
from fastapi import FastAPI, Header, Request, Response
from psycopg_pool import AsyncConnectionPool, PoolTimeout

pool = AsyncConnectionPool(os.environ["DATABASE_URL"], open=False, min_size=1, max_size=20, timeout=5)
# A client may send the key in quotes or without them (RFC 9651): both are one key.
KEY = Header(pattern=r'^"?[^"\\]+"?$')
PROBLEMS = {"in_flight": 409, "key_reused": 422, "indeterminate": 409}


@asynccontextmanager
async def lifespan(_app):
    async with pool:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/payments")
async def pay(request: Request, idempotency_key: str = KEY, x_user_id: str = Header()):
    body = await request.body()
    try:
        payment = {name: json.loads(body)[name] for name in ("amount", "currency")}
    except (ValueError, LookupError, TypeError):
        return Response("the body must be JSON with amount and currency", 400)
    # A real service takes the user from the verified token.
    key = {"scope": x_user_id, "operation": "POST /payments", "value": idempotency_key.strip('"')}
    # The path as the client has sent it: request.url.path is decoded.
    query = request.scope["query_string"]
    target = request.scope["raw_path"] + (b"?" + query if query else b"")
    key["request"] = request.method.encode() + b" " + target + b"\n" + body
    try:
        # One transaction: it commits where the block ends, and rolls back if an error leaves it.
        async with pool.connection() as conn:
            claimed = await conn.execute(
                "select outcome, token, status, body from idempotency.ensure(scope => %(scope)s, operation => %(operation)s,"
                " value => %(value)s, fingerprint => idempotency.fingerprint(%(request)s::bytea))",
                key,
            )
            outcome, token, status, answer = await claimed.fetchone()
            if outcome == "claimed":
                inserted = await conn.execute(
                    "insert into payments (amount, currency) values (%(amount)s, %(currency)s) returning id", payment
                )
                (id,) = await inserted.fetchone()
                status, answer = 201, json.dumps({"id": id, **payment}).encode()
                await conn.execute(
                    "select idempotency.complete(scope => %(scope)s, operation => %(operation)s, value => %(value)s,"
                    " token => %(token)s, status => %(status)s, body => %(answer)s::bytea)",
                    {**key, "token": token, "status": status, "answer": answer},
                )
            elif outcome != "replayed":
                return Response(outcome, PROBLEMS.get(outcome, 500), {"Retry-After": "1"} if outcome == "in_flight" else None)
    except (psycopg.OperationalError, PoolTimeout):
        # A connection that is lost, or that the pool does not get; 40001 and 40P01. The same request may succeed later.
        return Response("the database did not answer; retry with the same key", 503)
    except psycopg.DatabaseError as error:
        # A value or a row that the database refuses, or a key that is too long. Any other error is a 500.
        if isinstance(error, (psycopg.DataError, psycopg.IntegrityError)) or error.sqlstate == "IK008":
            return Response("the database refuses this request", 400)
        raise
    return Response(answer, status or 200, media_type="application/json")
