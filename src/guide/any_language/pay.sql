-- psql -v ON_ERROR_STOP=1 -v user=ada -v key=key-1 -v cents=1250 -f pay.sql
begin;
-- psql unsets the variable of a null, and would then print its name.
select outcome, token, coalesce(status::text, '') as status, coalesce(convert_from(body, 'UTF8'), '') as body
from idempotency.ensure(
    scope => :'user', operation => 'POST /payments', value => :'key',
    fingerprint => idempotency.fingerprint(convert_to(concat(E'POST /payments\n', :'cents'), 'UTF8'))
) \gset
select :'outcome' = 'claimed' as claimed \gset
\if :claimed
    insert into payments (payer, cents) values (:'user', :'cents') returning id \gset
    select 201 as status, format('{"id":%s}', :'id') as body \gset
    select idempotency.complete(
        scope => :'user', operation => 'POST /payments', value => :'key', token => :'token', status => :'status',
        body => convert_to(:'body', 'UTF8')
    ) \gset
\endif
commit;
\echo :outcome :status :body
