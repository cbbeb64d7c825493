"""asgi-idempotency-header with its RedisBackend, as its README sets it up, around an insert with psycopg 3."""

import os
from contextlib import asynccontextmanager

from fastapi import FastAPI
from idempotency_header_middleware import IdempotencyHeaderMiddleware
from idempotency_header_middleware.backends import RedisBackend
from payments import NewPayment, pool, record
from redis.asyncio import Redis


@asynccontextmanager
async def lifespan(_app):
    async with pool:
        yield


backend = RedisBackend(redis=Redis(unix_socket_path=os.environ["REDIS_SOCKET"]))

app = FastAPI(lifespan=lifespan)
app.add_middleware(IdempotencyHeaderMiddleware, backend=backend)


@app.post("/payments", status_code=201)
async def pay(payment: NewPayment):
    return await record(payment)
