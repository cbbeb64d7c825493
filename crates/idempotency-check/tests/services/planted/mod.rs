//! Planted errors.

mod mistake;
mod server;

use mistake::Mistake;

/// The tests start this binary again for the server that they check.
#[test]
#[ignore = "is the server that the other tests start"]
fn the_planted_server() {
    let Ok(mistake) = std::env::var("PLANTED_MISTAKE") else { return };
    let database_url = std::env::var("DATABASE_URL").expect("the check sets it");
    let port = std::env::var("PLANTED_PORT").expect("set with the mistake").parse().expect("a port");
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    runtime.block_on(server::serve(&database_url, port, Mistake::from_name(&mistake))).expect("the server starts");
}
