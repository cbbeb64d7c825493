//! What is done to an order that there is: PATCH, DELETE, and the counter.

use reqwest::Method;

use crate::client::Client;
use crate::phone::ride;
use crate::story::Story;

/// Keys are remembered for 24.
const RETENTION_IS_OVER: i32 = 25;

pub(crate) async fn tell(client: &Client, story: &mut Story) -> anyhow::Result<()> {
    redirected(client, story).await?;
    deleted_twice(client, story).await?;
    counted(client, story).await
}

async fn redirected(client: &Client, story: &mut Story) -> anyhow::Result<()> {
    story.scene("PATCH: a new destination, and a retry that must not bring the old one back");
    let finn = client.passenger("finn").await?;
    let path = format!("/orders/{}", finn.order("finn-1", "station").await.json("id"));
    let to_zoo = finn.send(Method::PATCH, &path, "finn-2", &ride("zoo")).await;
    story.check("to the zoo", to_zoo.json("destination"), "zoo");
    let to_park = finn.send(Method::PATCH, &path, "finn-3", &ride("park")).await;
    story.check("no, to the park", to_park.json("destination"), "park");
    let late = finn.send(Method::PATCH, &path, "finn-2", &ride("zoo")).await;
    story.check("the first change, delivered again", &late, "200 replayed");
    story.check("the taxi still goes to the park", finn.list().await.text.contains("\"park\""), true);
    Ok(())
}

async fn deleted_twice(client: &Client, story: &mut Story) -> anyhow::Result<()> {
    story.scene("DELETE twice: the same answer within the window, and the truth after it");
    let gus = client.passenger("gus").await?;
    let path = format!("/orders/{}", gus.order("gus-1", "harbour").await.json("id"));
    let first = gus.send(Method::DELETE, &path, "gus-2", "").await;
    story.check("cancelled", &first, "200");
    let again = gus.send(Method::DELETE, &path, "gus-2", "").await;
    story.check("the retry", &again, "200 replayed");
    story.check("byte for byte", again.text == first.text, true);
    story.check("with a key of its own", gus.send(Method::DELETE, &path, "gus-3", "").await, "410 cancelled");
    client.pass_hours(&gus.passenger, RETENTION_IS_OVER).await?;
    story.check("the retry, a day later", gus.send(Method::DELETE, &path, "gus-2", "").await, "410 cancelled");
    Ok(())
}

async fn counted(client: &Client, story: &mut Story) -> anyhow::Result<()> {
    story.scene("A counter of rides, which nothing but the key keeps from counting twice");
    let hal = client.passenger("hal").await?;
    let path = format!("/orders/{}/complete", hal.order("hal-1", "theatre").await.json("id"));
    let first = hal.send(Method::POST, &path, "hal-2", "").await;
    story.check("the ride is over; completed rides", first.json("completed_rides"), 1);
    for _ in 0..3 {
        let again = hal.send(Method::POST, &path, "hal-2", "").await;
        story.check("the retry", &again, "200 replayed");
    }
    story.check("completed rides", client.completed_rides(&hal.passenger).await?, 1);
    story.check("with a key of its own", hal.send(Method::POST, &path, "hal-3", "").await, "409 completed");
    story.check("completed rides", client.completed_rides(&hal.passenger).await?, 1);
    Ok(())
}
