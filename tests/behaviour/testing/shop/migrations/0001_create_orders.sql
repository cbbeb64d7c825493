-- The application's own table, of its own migrations: see tests/behaviour/recipes.rs.
create table orders (
    id bigint generated always as identity primary key,
    what text not null
);
