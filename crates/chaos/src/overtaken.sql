-- Notes each row that was committed when a later attempt had claimed the operation. Most of these rows do no harm,
-- because the later attempt finds that the step has a result. So the checker would not see them without a note.
create function note_if_overtaken() returns trigger
language plpgsql set idempotency.claim = 'exempt' as $$
begin
    insert into part
    select new.key, new.call, 'overtaken', null, new.attempt
    from idempotency.record
    where scope = new.key and value = new.key and attempt <> new.attempt
        -- A service has its tables in a schema of its name.
        and operation = case current_schema()::text when 'public'::text then 'chaos'::text
            else current_schema()::text || ' POST /'::text end;
    return null;
end $$;
-- At COMMIT the step has locked the record, so that no other attempt can claim it any more.
create constraint trigger note_if_overtaken after insert on part deferrable initially deferred
for each row when (new.step = 'row') execute function note_if_overtaken();
