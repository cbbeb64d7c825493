//! A gateway that sends texts, as far as anybody can tell. It takes no key to dedupe by, as many do not.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};

use uuid::Uuid;

/// What goes wrong with a text.
#[derive(Clone, Copy)]
pub(crate) enum Mishap {
    /// Refused, and nothing was sent.
    Busy,
    /// Sent, and who asked dies before he hears of it.
    SenderDies,
}

/// The gateway's manual promises that nothing was sent.
#[derive(Debug)]
pub(crate) struct Busy;

#[derive(Default)]
pub(crate) struct Gateway {
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    /// The order of each text that was sent.
    sent: Vec<Uuid>,
    /// What is to go wrong with an order's next text.
    mishaps: HashMap<Uuid, Mishap>,
}

impl Gateway {
    /// Returns the text's number.
    pub(crate) async fn send(&self, order: Uuid, _phone: &str, _text: &str) -> Result<usize, Busy> {
        let (mishap, number) = self.with_books(|books| {
            let mishap = books.mishaps.remove(&order);
            if !matches!(mishap, Some(Mishap::Busy)) {
                books.sent.push(order);
            }
            (mishap, books.sent.len())
        });
        match mishap {
            None => Ok(number),
            Some(Mishap::Busy) => Err(Busy),
            // A panic without the noise of one.
            Some(Mishap::SenderDies) => resume_unwind(Box::new("the handler dies here")),
        }
    }

    pub(crate) fn expect(&self, order: Uuid, mishap: Mishap) {
        self.with_books(|books| books.mishaps.insert(order, mishap));
    }

    /// How many texts were sent about this order.
    pub(crate) fn sent(&self, order: Uuid) -> usize {
        self.with_books(|books| books.sent.iter().filter(|sent| **sent == order).count())
    }

    fn with_books<T>(&self, look: impl FnOnce(&mut Books) -> T) -> T {
        look(&mut self.books.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
