//! Ordering a taxi, and all that gets in between.

use std::time::Duration;

use reqwest::Method;
use tokio::time::sleep;

use crate::client::Client;
use crate::story::Story;

/// Enough for the server to see that the connection is gone, while the order still waits at the gate.
const NOTICED: Duration = Duration::from_millis(100);

pub(crate) async fn tell(client: &Client, story: &mut Story) -> anyhow::Result<()> {
    double_click(client, story).await?;
    tunnel(client, story).await?;
    changed_destination(client, story).await?;
    two_phones(client, story).await?;
    cancelled_meanwhile(client, story).await
}

async fn double_click(client: &Client, story: &mut Story) -> anyhow::Result<()> {
    story.scene("A double click: two requests at once, one key");
    let ada = client.passenger("ada").await?;
    let gate = client.no_inserts().await?;
    let first = tokio::spawn({
        let ada = ada.clone();
        async move { ada.order("click-1", "station").await }
    });
    client.in_the_middle().await?;
    let second = ada.order("click-1", "station").await;
    story.check("the second click, while the first is under way", &second, "409 in-flight");
    story.check("its Retry-After, in seconds", second.retry_after.unwrap_or_default(), 1);
    gate.rollback().await?;
    let first = first.await?;
    story.check("the first click", &first, "201");
    let again = ada.order_patiently("click-1", "station").await;
    story.check("the second click, once more", &again, "201 replayed");
    story.check("both hear of the same order", again.text == first.text, true);
    story.check("orders", client.orders(&ada.passenger).await?, 1);
    Ok(())
}

async fn tunnel(client: &Client, story: &mut Story) -> anyhow::Result<()> {
    story.scene("A tunnel: the request gets out, the answer does not get in");
    let ben = client.passenger("ben").await?;
    let gate = client.no_inserts().await?;
    let connection = ben.order_and_lose_sight("tunnel-1", "airport").await?;
    client.in_the_middle().await?;
    drop(connection);
    sleep(NOTICED).await;
    gate.rollback().await?;
    let again = ben.order_patiently("tunnel-1", "airport").await;
    story.check("the retry behind the tunnel", &again, "201 replayed");
    story.check("orders", client.orders(&ben.passenger).await?, 1);
    Ok(())
}

async fn changed_destination(client: &Client, story: &mut Story) -> anyhow::Result<()> {
    story.scene("Another destination under the same key");
    let cem = client.passenger("cem").await?;
    story.check("to the station", cem.order("cem-1", "station").await, "201");
    story.check("to the airport, with the same key", cem.order("cem-1", "airport").await, "422 key-reused");
    story.check("to the airport, with a key of its own", cem.order("cem-2", "airport").await, "201");
    story.check("orders", client.orders(&cem.passenger).await?, 2);
    Ok(())
}

async fn two_phones(client: &Client, story: &mut Story) -> anyhow::Result<()> {
    story.scene("Two phones of one passenger, with one view of the orders");
    let dana = client.passenger("dana").await?;
    let (phone, tablet) = (dana.clone(), dana);
    let seen = phone.list().await;
    story.check("the list on both", &seen.text, "[]");
    story.check("a taxi, from the phone", phone.order_if(&seen, "phone-1", "opera").await, "201");
    let stale = tablet.order_if(&seen, "tablet-1", "opera").await;
    story.check("a taxi, from the tablet, which has not looked since", &stale, "412 stale-list");
    story.check("orders", client.orders(&tablet.passenger).await?, 1);

    // The retry of the first order has a view from before it, and that must not count against it.
    let late = phone.order_if(&seen, "phone-1", "opera").await;
    story.check("the phone's order again, with its old view", late, "201 replayed");

    let seen = tablet.list().await;
    let second = tablet.order_if(&seen, "tablet-1", "opera").await;
    story.check("the tablet has looked, and means a second taxi, with its key", second, "201");
    story.check("orders", client.orders(&tablet.passenger).await?, 2);
    Ok(())
}

async fn cancelled_meanwhile(client: &Client, story: &mut Story) -> anyhow::Result<()> {
    story.scene("An order that was cancelled, and a retry of it that comes late");
    let eva = client.passenger("eva").await?;
    let first = eva.order("eva-1", "museum").await;
    story.check("a taxi", &first, "201");
    let path = format!("/orders/{}", first.json("id"));
    story.check("cancelled", eva.send(Method::DELETE, &path, "eva-2", "").await, "200");
    let late = eva.order("eva-1", "museum").await;
    story.check("the retry, for the key outlives the order", &late, "201 replayed");
    story.check("which hears the first answer", late.text == first.text, true);
    story.check("orders", client.orders(&eva.passenger).await?, 1);
    story.check("and it stays cancelled", eva.list().await.text.contains("\"cancelled\""), true);
    Ok(())
}
