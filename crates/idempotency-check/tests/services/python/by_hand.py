"""FastAPI and psycopg 3: the key, the payment and the exact bytes of the answer commit in one transaction."""

import hashlib
import json
import os
from contextlib import asynccontextmanager

import psycopg
from fastapi import FastAPI, Header, Request, Response
from psycopg_pool import AsyncConnectionPool, PoolTimeout

pool = AsyncConnectionPool(os.environ["DATABASE_URL"], open=False, min_size=1, max_size=20, timeout=5)


@asynccontextmanager
async def lifespan(_app):
    async with pool:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/payments")
async def pay(request: Request, idempotency_key: str = Header(), x_user_id: str = Header()):
    body = await request.body()
    payment = json.loads(body)
    key = (x_user_id, idempotency_key)
    fingerprint = hashlib.sha256(body).digest()
    try:
        # Commits where the block ends, and rolls back if an error leaves it.
        async with pool.connection() as conn:
            # Waits while another transaction holds the key.
            claimed = await conn.execute(
                "insert into idempotency_key (scope, value, fingerprint) values (%s, %s, %s) on conflict do nothing",
                (*key, fingerprint),
            )
            if claimed.rowcount == 0:
                stored = await conn.execute(
                    "select fingerprint, status, body from idempotency_key where scope = %s and value = %s", key
                )
                first_fingerprint, status, answer = await stored.fetchone()
                if first_fingerprint != fingerprint:
                    return Response("this key was used with another body", 422)
                return Response(answer, status, media_type="application/json")
            inserted = await conn.execute(
                "insert into payments (amount, currency) values (%s, %s) returning id",
                (payment["amount"], payment["currency"]),
            )
            (id,) = await inserted.fetchone()
            answer = json.dumps({"id": id, **payment}).encode()
            await conn.execute(
                "update idempotency_key set status = 201, body = %s where scope = %s and value = %s", (answer, *key)
            )
    except (psycopg.OperationalError, PoolTimeout):
        return Response("the database did not answer; retry with the same key", 503)
    return Response(answer, 201, media_type="application/json")
