//! The customers: some click twice, some never come back, and all others ask again until they have an answer.

use std::sync::PoisonError;
use std::time::Duration;

use reqwest::{Client, StatusCode};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::crew::Addresses;
use crate::dice;
use crate::gateways::DECLINED;
use crate::ride::NewRide;

/// How many customers ask at the same time.
const AT_ONCE: usize = 10;
/// A suspended worker does not answer, and the next one does.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(300)];
/// The clients that never come back wait this long.
const PATIENCE: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(150)];

/// A customer, and the one ride that they want.
#[derive(Clone)]
pub(crate) struct Customer {
    pub(crate) number: usize,
    pub(crate) ride: NewRide,
    run: String,
    client: Client,
    addresses: Addresses,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Manner {
    ClicksTwice,
    NeverComesBack,
    AsksUntilAnswered,
}

impl Customer {
    pub(crate) fn all(count: usize, run: &str, addresses: &Addresses) -> Vec<Self> {
        let client = Client::new();
        let customer = |number| {
            let card = if number % 20 == 7 { DECLINED.to_owned() } else { format!("tok_{number}") };
            let [from, to] = ["Alamo Square", "Union Square"].map(str::to_owned);
            let ride = NewRide { from, to, card, phone: format!("+1202555{number:04}"), cents: 1250 };
            Self { number, ride, run: run.to_owned(), client: client.clone(), addresses: addresses.clone() }
        };
        (0..count).map(customer).collect()
    }

    pub(crate) fn is_declined(&self) -> bool {
        self.ride.card == DECLINED
    }

    pub(crate) fn comes_back(&self) -> bool {
        self.manner() != Manner::NeverComesBack
    }

    fn manner(&self) -> Manner {
        match self.number % 4 {
            0 => Manner::ClicksTwice,
            1 => Manner::NeverComesBack,
            _ => Manner::AsksUntilAnswered,
        }
    }

    /// The answers that this customer gets.
    async fn behave(&self) -> Vec<Answer> {
        match self.manner() {
            Manner::ClicksTwice => {
                let (first, second) = tokio::join!(self.ask_until_answered(), self.ask_until_answered());
                vec![first, second]
            }
            Manner::NeverComesBack => {
                let _ = self.ask(dice::duration(PATIENCE[0], PATIENCE[1])).await;
                Vec::new()
            }
            Manner::AsksUntilAnswered => vec![self.ask_until_answered().await],
        }
    }

    /// Asks with the same key until the ride is booked or declined.
    pub(crate) async fn ask_until_answered(&self) -> Answer {
        loop {
            if let Ok(answer) = self.ask(ANSWER_LIMIT).await
                && matches!(answer.status, StatusCode::CREATED | StatusCode::PAYMENT_REQUIRED)
            {
                return answer;
            }
            sleep(dice::duration(PAUSES[0], PAUSES[1])).await;
        }
    }

    async fn ask(&self, limit: Duration) -> reqwest::Result<Answer> {
        let address = {
            let addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
            // None is there while all are being replaced.
            let any = dice::below(addresses.len().max(1) as u128) as usize;
            addresses.get(any).cloned().unwrap_or_else(|| "http://127.0.0.1:1".to_owned())
        };
        let request = self.client.post(format!("{address}/rides")).timeout(limit).json(&self.ride);
        let request = request.header("x-user-id", &self.run).header("idempotency-key", self.key());
        let answer = request.send().await?;
        Ok(Answer { status: answer.status(), body: answer.text().await? })
    }

    fn key(&self) -> String {
        format!("ride-{}", self.number)
    }
}

/// Lets all customers ask, and returns their answers in their order.
pub(crate) async fn all_behave(customers: Vec<Customer>) -> anyhow::Result<Vec<Vec<Answer>>> {
    let mut answers = vec![Vec::new(); customers.len()];
    let mut waiting = customers.into_iter();
    let mut asking = JoinSet::new();
    loop {
        while asking.len() < AT_ONCE
            && let Some(customer) = waiting.next()
        {
            asking.spawn(async move { (customer.number, customer.behave().await) });
        }
        let Some(answered) = asking.join_next().await else { return Ok(answers) };
        let (number, got) = answered?;
        answers[number] = got;
    }
}
