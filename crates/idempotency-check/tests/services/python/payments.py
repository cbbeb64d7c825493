"""What the packages are put around: one payment, inserted with psycopg 3 in a transaction of its own."""

import os

from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel

pool = AsyncConnectionPool(os.environ["DATABASE_URL"], open=False, min_size=1, max_size=20, timeout=5)


class NewPayment(BaseModel):
    amount: int
    currency: str


async def record(payment):
    # Commits where the block ends.
    async with pool.connection() as conn:
        inserted = await conn.execute(
            "insert into payments (amount, currency) values (%s, %s) returning id",
            (payment.amount, payment.currency),
        )
        (id,) = await inserted.fetchone()
    return {"id": id, "amount": payment.amount, "currency": payment.currency}
