//! The programs of the guide's page on any language that are in Rust. The guide shows these files, and the published
//! package has to contain them.

#[path = "../../../src/guide/any_language/with_diesel.rs"]
pub mod with_diesel;
#[path = "../../../src/guide/any_language/with_tokio_postgres.rs"]
pub mod with_tokio_postgres;
