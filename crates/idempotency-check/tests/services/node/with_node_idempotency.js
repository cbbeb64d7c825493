// @node-idempotency/nestjs with its Redis adapter, as its README sets it up, around an insert with pg.
require("reflect-metadata");
const { Body, Controller, Module, Post } = require("@nestjs/common");
const { NestFactory } = require("@nestjs/core");
const { Idempotent, NodeIdempotencyModule, StorageAdapterEnum } = require("@node-idempotency/nestjs");
const { record } = require("./payments");

class Payments {
  pay(payment) {
    return record(payment);
  }
}

class App {}

// The README's decorators, without a compiler for their syntax.
const pay = Object.getOwnPropertyDescriptor(Payments.prototype, "pay");
Body()(Payments.prototype, "pay", 0);
Post("payments")(Payments.prototype, "pay", pay);
Idempotent()(Payments.prototype, "pay", pay);
Controller()(Payments);
Module({
  imports: [
    NodeIdempotencyModule.forRootAsync({
      storage: { adapter: StorageAdapterEnum.redis, options: { socket: { path: process.env.REDIS_SOCKET } } },
    }),
  ],
  controllers: [Payments],
})(App);

NestFactory.create(App, { logger: ["error"] }).then((app) => app.listen(Number(process.env.PORT), "127.0.0.1"));
