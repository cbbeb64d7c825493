-- A gateway that takes no idempotency key, and can be asked. A request takes effect when it is due.
alter table effect add column due timestamptz not null default '-infinity', add column part float8 not null default 0;
create table sent (key text collate "C" not null, call text not null, token bigint not null);
-- The probes that were answered, and whose process has not gone on yet.
create table probed (worker text not null);
create table refused (token bigint not null);
-- A request takes effect after this part of the time that is left until `latest` after the end of its lease; never if
-- the part is null. One that arrives later, from a process that was suspended before it sent it, is lost. So it depends
-- on no clock but this one whether a probe comes too early.
create function send_unsure(
    the_key text, the_call text, the_downstream_key text, the_token bigint, part float8, latest interval
) returns void
language plpgsql set idempotency.claim = 'exempt' as $$
declare
    moment timestamptz;
    deadline timestamptz;
begin
    -- Probes wait for it, so each probe sees every request that was due before it.
    lock table sent in row exclusive mode;
    moment := clock_timestamp();
    insert into sent values (the_key, the_call, the_token);
    select lease_until + latest into deadline
    from idempotency.record
    where scope = the_key and operation = 'chaos'::text and value = the_key and token = the_token;
    if moment < deadline and part is not null and not exists (select from refused where token = the_token) then
        insert into effect
        values (the_key, the_call, the_downstream_key, the_token, moment + part * (deadline - moment), part);
    end if;
end $$;
create function probe(the_downstream_key text, the_worker text) returns text
language plpgsql as $$
begin
    lock table sent in share mode;
    insert into probed values (the_worker);
    return (select call from effect where downstream_key = the_downstream_key and due <= clock_timestamp() limit 1);
end $$;
-- What an operator asks for: the effect, or that there will be none.
create function refuse(the_downstream_key text, the_token bigint) returns text
language plpgsql set idempotency.claim = 'exempt' as $$
declare
    moment timestamptz;
begin
    lock table sent in share row exclusive mode;
    moment := clock_timestamp();
    insert into refused values (the_token);
    delete from effect where downstream_key = the_downstream_key and token = the_token and due > moment;
    return (select call from effect where downstream_key = the_downstream_key limit 1);
end $$;
