//! The parts of PostgreSQL's wire protocol that a proxy needs: messages, a listening side, and a relay. The relay asks
//! a [`Tap`] about each message.

mod address;
mod entrance;
mod message;
mod relay;

pub use address::{Address, Stream};
pub use entrance::Entrance;
pub use message::{Message, Rejection};
pub use relay::{Flow, Tap, relay};
