-- What the calls of a scenario affect. No table has a unique constraint, so a second effect shows. An outside database
-- has these tables too.
create table effect (key text collate "C" not null, call text not null, downstream_key text, token bigint);
-- Writes an effect that is outside on purpose, without a round trip more than the insert. Leases have their effects in
-- another system, which this database only plays.
create function affect_outside(the_key text, the_call text, the_downstream_key text, the_token bigint) returns void
language plpgsql set idempotency.claim = 'exempt' as $$
begin
    insert into effect values (the_key, the_call, the_downstream_key, the_token);
end $$;
-- The effect of `idempotency.run`, and its answer: the name of the call, as the library stores it.
create function affect(argument jsonb, out status int4, out headers jsonb, out body bytea)
language plpgsql as $$
begin
    insert into effect (key, call) values (argument->>'key'::text, argument->>'call'::text);
    if (argument->>'fails'::text)::boolean then
        raise exception 'the request says that it fails' using errcode = 'CH001';
    end if;
    status := 200;
    body := convert_to((argument->'call'::text)::text, 'UTF8');
end $$;
-- Rows that a scenario writes in autocommit.
create table written (call text not null);

-- The effects of steps.
create table part (
    key text collate "C" not null, call text not null, step text not null, downstream_key text, attempt int not null
);
-- The gateway of the texts sends a text for an attempt until the operator withdraws it. A worker that wakes after
-- that must not send it.
create table withdrawn (key text not null, step text not null, attempt int not null);
create function send(the_key text, the_call text, the_step text, the_downstream_key text, the_attempt int)
returns boolean
language plpgsql set idempotency.claim = 'exempt' as $$
begin
    lock table withdrawn in row exclusive mode;
    insert into part
    select the_key, the_call, the_step, the_downstream_key, the_attempt
    where not exists (select from withdrawn where key = the_key and step = the_step and attempt = the_attempt);
    return found;
end $$;
create function charge(the_key text, the_call text, the_step text, the_downstream_key text, the_attempt int)
returns boolean
language plpgsql set idempotency.claim = 'exempt' as $$
begin
    insert into part values (the_key, the_call, the_step, the_downstream_key, the_attempt);
    return true;
end $$;
-- The row of a step in the database. The protection of the table holds.
create function add(the_key text, the_call text, the_step text, the_downstream_key text, the_attempt int)
returns boolean
language plpgsql as $$
begin
    insert into part values (the_key, the_call, the_step, the_downstream_key, the_attempt);
    return true;
end $$;
create function withdraw(the_key text, the_step text, the_attempt int) returns text
language plpgsql as $$
begin
    lock table withdrawn in share row exclusive mode;
    insert into withdrawn values (the_key, the_step, the_attempt);
    return (select call from part where key = the_key and attempt = the_attempt and step = the_step limit 1);
end $$;
