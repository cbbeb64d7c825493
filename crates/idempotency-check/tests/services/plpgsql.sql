create function pay(who text, key text, request bytea, out status int, out body bytea) language plpgsql as $$
declare
    answer record;
    payment constant jsonb := convert_from(request, 'UTF8')::jsonb;
    id bigint;
begin
    select * into answer from idempotency.ensure(
        scope => who, operation => 'POST /payments', value => key,
        fingerprint => idempotency.fingerprint(convert_to(E'POST /payments\n', 'UTF8') || request)
    );
    status := answer.status;
    body := answer.body;
    if answer.outcome = 'claimed' then
        insert into payments (amount, currency) values ((payment ->> 'amount')::bigint, payment ->> 'currency')
        returning payments.id into id;
        status := 201;
        body := convert_to((jsonb_build_object('id', id) || payment)::text, 'UTF8');
        perform idempotency.complete(
            scope => who, operation => 'POST /payments', value => key, token => answer.token, status => status, body => body
        );
    elsif answer.outcome <> 'replayed' then
        status := case answer.outcome when 'key_reused' then 422 when 'in_flight' then 409 else 500 end;
        body := convert_to(answer.outcome, 'UTF8');
    end if;
end
$$;
