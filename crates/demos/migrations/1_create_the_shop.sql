-- The service of src/guide/existing has its own migrations, beside those of pg-idempotency.
create table stock (item text primary key, left_over bigint not null);
create table orders (id bigint generated always as identity primary key, item text not null);
create table payments (id bigint generated always as identity primary key, order_id bigint not null, charge text not null);
