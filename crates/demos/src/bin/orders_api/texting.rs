//! A text to the passenger: at most one, whatever becomes of who sends it.

use reqwest::Method;
use uuid::Uuid;

use crate::client::Client;
use crate::gateway::{Gateway, Mishap};
use crate::phone::Phone;
use crate::story::Story;

pub(crate) async fn tell(client: &Client, gateway: &Gateway, story: &mut Story) -> anyhow::Result<()> {
    sent_once(client, gateway, story).await?;
    refused_for_certain(client, gateway, story).await?;
    died_in_the_middle(client, gateway, story).await
}

async fn sent_once(client: &Client, gateway: &Gateway, story: &mut Story) -> anyhow::Result<()> {
    story.scene("A text, at most once");
    let ida = client.passenger("ida").await?;
    let (order, path) = ordered(&ida).await?;
    story.check("the text", ida.send(Method::POST, &path, "text-1", "").await, "200");
    story.check("the retry", ida.send(Method::POST, &path, "text-1", "").await, "200 replayed");
    story.check("texts that the gateway has sent", gateway.sent(order), 1);
    Ok(())
}

async fn refused_for_certain(client: &Client, gateway: &Gateway, story: &mut Story) -> anyhow::Result<()> {
    story.scene("A gateway that is busy, and says that nothing was sent");
    let jon = client.passenger("jon").await?;
    let (order, path) = ordered(&jon).await?;
    gateway.expect(order, Mishap::Busy);
    story.check("the text", jon.send(Method::POST, &path, "text-1", "").await, "503 gateway-busy");
    story.check("the retry, for the key is free", jon.send(Method::POST, &path, "text-1", "").await, "200");
    story.check("texts that the gateway has sent", gateway.sent(order), 1);

    let nowhere = jon.send(Method::POST, "/orders/no-uuid/text", "text-2", "").await;
    story.check("a text about an order that cannot be", nowhere, "404 unknown-order");
    let corrected = jon.send(Method::POST, &path, "text-2", "").await;
    story.check("about his own, with the same key", corrected, "200");
    story.check("texts that the gateway has sent", gateway.sent(order), 2);
    Ok(())
}

async fn died_in_the_middle(client: &Client, gateway: &Gateway, story: &mut Story) -> anyhow::Result<()> {
    story.scene("A handler that dies between the text and its answer");
    let kim = client.passenger("kim").await?;
    let (order, path) = ordered(&kim).await?;
    gateway.expect(order, Mishap::SenderDies);
    let lost = kim.send(Method::POST, &path, "text-1", "").await;
    story.check("the text", &lost, "no answer");
    for _ in 0..2 {
        let again = kim.send(Method::POST, &path, "text-1", "").await;
        story.check("the retry, for nobody here knows", &again, "409 indeterminate");
    }
    story.check("texts that the gateway has sent", gateway.sent(order), 1);
    Ok(())
}

async fn ordered(phone: &Phone) -> anyhow::Result<(Uuid, String)> {
    let order = phone.order("order-1", "station").await.json("id").parse()?;
    Ok((order, format!("/orders/{order}/text")))
}
