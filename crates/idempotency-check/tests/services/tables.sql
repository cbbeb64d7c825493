create table payments (
    id bigint generated always as identity,
    amount bigint not null,
    currency text not null,
    -- Of the planted mistakes only, so that a query can show the payments of one key.
    key text
);

-- Of the middlewares that are made by hand. The packages have their own stores.
create table idempotency_key (
    scope text,
    value text,
    fingerprint bytea not null,
    status smallint,
    body bytea,
    body_as_jsonb jsonb,
    primary key (scope, value)
);
