"""idemkit with its PostgresBackend and a scope, as its README sets it up for production, around an insert with psycopg 3.

`idemkit init-pg` has created its table before.
"""

import os
from contextlib import asynccontextmanager

from fastapi import FastAPI
from idemkit import HttpConfig, IdempotencyMiddleware, PostgresBackend
from payments import NewPayment, pool, record


@asynccontextmanager
async def lifespan(_app):
    async with pool:
        yield


app = FastAPI(lifespan=lifespan)
app.add_middleware(
    IdempotencyMiddleware,
    backend=PostgresBackend.from_url(os.environ["DATABASE_URL"]),
    config=HttpConfig(scope=lambda request: request.headers.get("x-user-id", "anonymous")),
)


@app.post("/payments", status_code=201)
async def pay(payment: NewPayment):
    return await record(payment)
