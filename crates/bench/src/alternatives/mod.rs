//! What is measured against each other: the same business, kept from happening twice in different ways, or not at all.

pub(crate) mod by_hand;
pub(crate) mod handler;
pub(crate) mod library;
pub(crate) mod pgbench;
pub(crate) mod redis;
pub(crate) mod usual;

use std::sync::Arc;

use crate::bench::Bench;
use crate::client::bare;
use crate::way::Way;

pub(crate) const BARE: &str = "bare transaction";

pub(crate) fn bare_call() -> Way {
    Way::new(BARE, |client, _| Box::pin(async move { Ok(bare(client).await?) }))
}

/// First calls, in every way that there is here.
pub(crate) fn first_calls(bench: &Bench, response: &Arc<str>) -> Vec<Way> {
    let mut ways = first_calls_on_postgres(bench, response);
    if bench.redis.is_some() {
        ways.push(redis::first_call(response.clone()));
    }
    if let Some(program) = &bench.pgbench {
        ways.push(Way::pgbench(program.clone(), bench.by_hand.script(response)).filling(library::TABLE));
    }
    ways
}

pub(crate) fn first_calls_on_postgres(bench: &Bench, response: &Arc<str>) -> Vec<Way> {
    let mut ways = vec![bare_call(), bench.by_hand.first_call(response.clone()), usual::first_call(response.clone())];
    for variant in library::VARIANTS {
        ways.push(variant.first_call(response.clone()));
    }
    ways
}
