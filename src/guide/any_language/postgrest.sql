create role shop_api;
create role web_user;
grant usage on schema idempotency to shop_api;
grant select, insert, update on idempotency.record to shop_api;
grant execute on function idempotency.ensure, idempotency.complete, idempotency.fingerprint to shop_api;

create schema api;
-- The user of the verified token.
create function api.caller() returns text language sql stable set search_path = pg_catalog, pg_temp as $$
    select nullif(current_setting('request.jwt.claims', true)::jsonb ->> 'sub', '')
$$;
create table api.payments (id bigint generated always as identity, payer text not null, payee text not null, cents int not null);
alter table api.payments enable row level security;
create policy own on api.payments using (payer = api.caller());
grant usage on schema api to web_user, shop_api;
grant select, insert on api.payments to web_user;

create function api.claim_payment(value text, request bytea)
returns table (outcome text, token bigint, status int, body bytea, retry_after interval)
language sql security definer set search_path = pg_catalog, pg_temp as $$
    select outcome, token, status, body, retry_after
    from idempotency.ensure(
        scope => api.caller(), operation => 'POST /payments', value => value,
        fingerprint => idempotency.fingerprint(request)
    )
$$;

create function api.complete_payment(value text, token bigint, status int, body bytea)
returns void language sql security definer set search_path = pg_catalog, pg_temp as $$
    select idempotency.complete(
        scope => api.caller(), operation => 'POST /payments', value => value,
        token => token, status => status, body => body
    )
$$;

create function api.pay(value text, payee text, cents int)
returns table (status int, body bytea) language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    answer record;
begin
    select * into answer from api.claim_payment(value, convert_to(json_build_array(payee, cents)::text, 'UTF8'));
    if answer.outcome = 'claimed' then
        insert into api.payments (payer, payee, cents) values (api.caller(), pay.payee, pay.cents);
        answer.status := 201;
        answer.body := convert_to(json_build_object('paid', cents)::text, 'UTF8');
        perform api.complete_payment(value, answer.token, answer.status, answer.body);
    elsif answer.outcome <> 'replayed' then
        answer.status := case answer.outcome when 'key_reused' then 422 when 'in_flight' then 409 when 'indeterminate' then 409 else 500 end;
        answer.body := convert_to(json_build_object('problem', answer.outcome)::text, 'UTF8');
    end if;
    return query select answer.status, answer.body;
end
$$;

-- Once for each function: otherwise its owner would be the role that has created it, and the first two would have all rights of that role.
grant create on schema api to shop_api;
alter function api.claim_payment owner to shop_api;
alter function api.complete_payment owner to shop_api;
revoke create on schema api from shop_api;
revoke all on function api.claim_payment, api.complete_payment, api.pay from public;
grant execute on function api.claim_payment, api.complete_payment, api.pay to web_user;
