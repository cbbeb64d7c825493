//! A process of the service: it serves requests, and resumes the rides of clients that do not come back.

use std::future::pending;
use std::time::Duration;

use pg_idempotency::lease::{Lease, Resumer};
use tokio::net::TcpListener;

use crate::mutant::Mutant;
use crate::ride::{NewRide, Rides, leasing};
use crate::service::router;

/// Ten seconds are usual.
const INTERVAL: Duration = Duration::from_millis(200);

/// Prints its address as soon as it takes requests. Ends only with an error, or with the process.
pub(crate) async fn work(rides: Rides) -> anyhow::Result<()> {
    if rides.mutant != Some(Mutant::NoResumer) {
        let resumer = Resumer::new(leasing()?, &rides.operation)?.with_interval(INTERVAL)?;
        let rides = rides.clone();
        tokio::spawn(async move {
            let work = async |lease: &Lease, new: NewRide| rides.perform(lease, &new).await;
            resumer.run(&rides.pool, pending(), work).await
        });
    }
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("http://{}", listener.local_addr()?);
    axum::serve(listener, router(rides)).await?;
    Ok(())
}
