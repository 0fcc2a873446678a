"""A worker that validates its input with pydantic."""

from pydantic import BaseModel

from stagemesh import Json, Worker, serve


class Person(BaseModel):
    """A person has a name and an age."""

    name: str
    age: int


class Greeter(Worker):
    """Greets a person."""

    inputs = {"person": Json()}
    outputs = {"greeting": Json()}

    def predict_item(self, item):
        """Returns a greeting."""
        person = Person.model_validate(item["person"])
        return {"greeting": f"Hello {person.name}, {person.age}"}


if __name__ == "__main__":
    serve(Greeter, arrays="buffer")
