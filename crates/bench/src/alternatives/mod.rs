//! What is measured against each other: the same business, kept from happening twice in different ways, or not at all.

pub(crate) mod by_hand;
pub(crate) mod handler;
pub(crate) mod library;
pub(crate) mod redis;
pub(crate) mod sql_functions;
pub(crate) mod usual;

use crate::client::bare;
use crate::way::Way;

pub(crate) const BARE: &str = "bare transaction";

pub(crate) fn bare_call() -> Way {
    Way::new(BARE, |client, _| Box::pin(async move { Ok(bare(client).await?) }))
}
