//! PostgreSQL's wire protocol, as far as a proxy needs it: whole messages, a listening side, and a relay that asks a
//! [`Tap`] about each message.

mod address;
mod entrance;
mod message;
mod relay;

pub use address::{Address, Stream};
pub use entrance::Entrance;
pub use message::{Message, Rejection};
pub use relay::{Flow, Tap, relay};
