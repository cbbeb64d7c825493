#![doc = include_str!("guide/links.md")]
#![doc = include_str!("guide/guide.md")]
// The module `guide` exists only in the documentation and its tests. The guide has pages instead of items.
//
// `guide/links.md` gives each label of a link its target in the documentation. At its end, each page defines its labels
// a second time, with targets in the repository, for people who read the page on a forge. If a label has two
// definitions, Markdown uses the first definition. `tests/docs.rs` checks both definitions.

macro_rules! pages {
    ($($name:ident: $summary:literal $(, $picture:literal)* $(with $code:literal)*;)*) => {
        $(
            #[doc = $summary]
            #[doc = ""]
            $(
                #[doc = include_str!(concat!("guide/pictures/", $picture, ".svg"))]
                #[doc = ""]
            )*
            #[doc = include_str!("guide/links.md")]
            #[doc = include_str!(concat!("guide/", stringify!($name), ".md"))]
            $(
                #[doc = "```ignore"]
                #[doc = include_str!(concat!("guide/", $code))]
                #[doc = "```"]
            )*
            pub mod $name {}
        )*
    };
}

pages! {
    first_key: "Step 1: make a payment once, although it is requested twice.";
    over_http: "Step 2: turn the program into a service.";
    elsewhere: "Step 3: charge a card at a payment gateway.";
    test_it: "Step 4: test the service on a real PostgreSQL.";
    run_it: "Step 5: prepare the service for production.";
    promises: "Which mode fits an operation, what is promised, and what is not.", "modes", "crash";
    specification: "The protocol as a specification, beside the SQL.";
    words: "The glossary.";
    axum: "The layer in an axum service.", "layers";
    http: "The HTTP layer: batches, large answers, refusals, agents.", "http"
        with "http/signed_urls.rs" with "http/tool_calls.rs";
    events: "Webhooks, queues and nonces.", "lease" with "../../examples/webhook.rs";
    engines: "Inside a job queue or a durable engine." with "engines/worker.rs";
    steps: "Charge a card, and write rows around it.", "steps" with "../../examples/ride.rs";
    orms: "SeaORM, other versions of sqlx, and other libraries." with "sea_orm.rs";
    nothing_escapes: "Let the database refuse writes outside an operation.";
    testing: "Test your service.";
    migrations: "Use the crate beside your migrations.";
    production: "Before production: a checklist.", "deployment";
    sizing: "How large the table becomes, and what it costs.";
    runbook: "What to do at each alert and each symptom.";
    settle: "Settle a key whose outcome is unknown.", "probes", "states";
    failures: "Fail-over, backups, erasure.";
    poolers: "Poolers and managed services.";
    larger: "Partitions, tenants, Citus, regions.";
    metrics: "Metrics, spans, logs and outcomes.";
}

/// The crate in an existing service: the code before and after, and the steps between.
///
#[doc = include_str!("guide/links.md")]
#[doc = include_str!("guide/existing.md")]
///
/// ```diff
#[doc = include_str!("guide/existing/change.diff")]
/// ```
// crates/demos/tests/existing.rs compiles and runs both versions.
pub mod existing {}

/// Call the protocol from any language, by SQL functions.
///
#[doc = include_str!("guide/links.md")]
#[doc = include_str!("guide/any_language.md")]
///
/// ## psql
///
/// ```sql
#[doc = include_str!("guide/any_language/pay.sql")]
/// ```
///
/// ## PostgREST or Supabase
///
/// ```sql
#[doc = include_str!("guide/any_language/postgrest.sql")]
/// ```
///
/// ## Python: FastAPI and psycopg
///
/// ```python
#[doc = include_str!("guide/any_language/payments.py")]
/// ```
///
/// ## Node: http and pg
///
/// ```js
#[doc = include_str!("guide/any_language/payments.js")]
/// ```
///
/// ## Rust: tokio-postgres
///
/// ```rust,ignore
#[doc = include_str!("guide/any_language/with_tokio_postgres.rs")]
/// ```
///
/// ## Rust: diesel-async
///
/// ```rust,ignore
#[doc = include_str!("guide/any_language/with_diesel.rs")]
/// ```
// The tests of crates/any-language and of crates/idempotency-check run these same files, and not copies of the files.
pub mod any_language {}

/// Tell clients how to retry.
///
#[doc = include_str!("guide/links.md")]
#[doc = include_str!("guide/clients.md")]
///
/// ## Rust
///
/// ```rust
#[doc = include_str!("guide/clients/retry.rs")]
/// ```
///
/// ## Python
///
/// ```python
#[doc = include_str!("guide/clients/retry.py")]
/// ```
///
/// ## TypeScript and JavaScript
///
/// The code is plain JavaScript. Under TypeScript's `strict`, add the types of the parameters.
///
/// ```js
#[doc = include_str!("guide/clients/retry.mjs")]
/// ```
// script/clients runs these same files, and not copies of the files.
pub mod clients {}
