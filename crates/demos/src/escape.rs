//! A mutant of every demo: each statement with which a run has written its protected tables is sent once more, through
//! the pool. The database has to refuse all of them.

use sqlx::{AssertSqlSafe, PgPool};

use crate::books::Books;

/// The trigger comes after that of `protect`, in the order of their names, so it logs no refused statement.
const LOG: &str = "
    create table written (statement text not null);

    create function log_written() returns trigger language plpgsql as $$
    begin
        insert into written values (current_query());
        return null;
    end
    $$;

    -- The trigger of `protect` belongs to the statement, and fires before a null could hurt.
    create function escapes() returns table (escaped text, state text) language plpgsql as $$
    declare
        nulls text;
    begin
        for escaped in select distinct statement from written order by statement loop
            execute 'prepare escape as ' || escaped;
            select string_agg('null', ', ') into nulls
            from pg_prepared_statements cross join unnest(parameter_types) where name = 'escape';
            begin
                execute 'execute escape' || coalesce('(' || nulls || ')', '');
                state := 'not refused';
            exception when others then
                state := sqlstate;
            end;
            execute 'deallocate escape';
            return next;
        end loop;
    end
    $$;
";

pub(crate) async fn log(pool: &PgPool, protected: &[String]) -> sqlx::Result<()> {
    sqlx::raw_sql(LOG).execute(pool).await?;
    for table in protected {
        let trigger = format!(
            "create trigger written before insert or update or delete or truncate on {table} execute function log_written()"
        );
        sqlx::raw_sql(AssertSqlSafe(trigger)).execute(pool).await?;
    }
    Ok(())
}

pub(crate) async fn check(pool: &PgPool, books: &mut Books) -> sqlx::Result<()> {
    books.scene("The same statements through the pool");
    let escapes: Vec<(String, String)> = sqlx::query_as("select escaped, state from escapes()").fetch_all(pool).await?;
    books.check_at_least("statements", escapes.len() as i64, 1);
    for (statement, state) in escapes {
        let start: Vec<&str> = statement.split_whitespace().take(4).collect();
        books.check(&format!("{} …: SQLSTATE", start.join(" ")), state, "IK006");
    }
    Ok(())
}
